"""Stage 4: an artifact's files, and other programs' folders, with the proof of what was written."""
