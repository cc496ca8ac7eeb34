"""Where workers run, behind one interface: in processes, or in this process on threads or the portal's loop."""
