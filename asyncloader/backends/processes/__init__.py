"""Worker processes, seen from the process that trains."""
