"""Other programs that synchronise parameters, side by side with this one."""
