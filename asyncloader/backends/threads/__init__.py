"""Workers in the process that trains: on threads, or on the portal's loop."""
