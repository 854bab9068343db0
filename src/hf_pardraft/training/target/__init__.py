"""What training reads of the frozen target: its states, live or stored, and its head."""
