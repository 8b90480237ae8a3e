"""How the small models and the data that OVAL is tried on are made."""
