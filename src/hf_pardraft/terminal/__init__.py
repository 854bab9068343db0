"""What a terminal shows of a text while it is written: accepted runs, nothing that steers it; and a chat with the target."""
