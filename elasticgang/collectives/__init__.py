"""What gangs and process groups have in common: the checked call, its forms, its work."""
