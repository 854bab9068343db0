"""The target writes what its drafter learns from: here, or through a server."""
