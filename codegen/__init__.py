"""Weight layouts, emitters and the small C runtime of compiled modules."""
