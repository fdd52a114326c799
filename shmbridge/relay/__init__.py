"""The bridge over more than one node: a relay on each, which takes records there and puts them here."""

__all__ = ["destination", "ray", "source", "wire"]
