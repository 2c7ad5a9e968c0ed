"""Keys and values that a session keeps, and how attention reads them."""
