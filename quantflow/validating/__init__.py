"""An artifact compared with its source: scores, gates, and the report."""
