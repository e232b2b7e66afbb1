"""The page for browsers: HTML, CSS and JavaScript in this folder, without a foreign host."""
