"""Tests of the GPU code that need no GPU."""
