"""The application around the library: files, order, resume, progress, provenance and verdicts. No tensor arithmetic."""
