"""thunder_mem: make programs compiled by lightning-thunder use less memory."""

__version__ = "0.1.0"
