"""Stage 4: an artifact's files, other programs' folders, and the proof of what was written."""
