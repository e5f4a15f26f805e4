"""Every path beside the bound that this machine sets to it, and how much of it is reached."""
