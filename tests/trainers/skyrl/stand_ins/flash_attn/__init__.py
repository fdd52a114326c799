"""In the place of flash-attn, which is for GPUs: SkyRL imports it where it builds no model, too."""

__version__ = "0"
