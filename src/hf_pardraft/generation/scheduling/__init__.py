"""How much each round drafts and verifies: plans, what they cost, what is accepted, and the choice between them."""
