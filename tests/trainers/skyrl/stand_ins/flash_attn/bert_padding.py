"""Names that SkyRL imports, and calls for rows without padding only."""

pad_input = unpad_input = None
