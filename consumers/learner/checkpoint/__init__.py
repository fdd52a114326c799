"""What of a run is saved, and when."""
