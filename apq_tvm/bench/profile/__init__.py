"""What each kernel call of a module's run takes on this machine, and how near its limit that is."""
