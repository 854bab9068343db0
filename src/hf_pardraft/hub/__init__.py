"""Between a drafter and the Hub: reading foreign layouts, model cards, publishing."""
