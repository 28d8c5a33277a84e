"""Adapters to other libraries, one file each. What they adapt is imported by that file alone."""
