"""Links of known rate and delay on one machine, and what syncs take over them."""
