"""Tests of the GPU code that need no GPU; "Finding N" is the review finding that a test guards."""
