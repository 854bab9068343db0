"""What commands write: by one writer at a time, as a whole or not at all, with nothing left behind."""
