"""Adapters to other libraries: one file each, which alone imports that library."""
