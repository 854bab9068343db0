"""Between a drafter and the Hub: model cards, measured results, publishing."""
