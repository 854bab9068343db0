"""How much each round drafts and verifies: plans, what they cost, what is accepted, and the choice between them.

What the words mean in here:

- a *try*: a round of another plan than the best one, to learn what that costs and brings;
- the *purse*: what tries may still lose, in rounds of the best plan; each round puts a little in;
- a *surprise*: a measurement of a plan that was hardly known, after which the choice is thought over at once;
- *upkeep*: what each round without a draft costs later, when the drafter reads what such rounds have written; the round in
  which it does so *stands for* all of them;
- the *handicap*: how much faster rounds without a draft have to be before they are chosen where drafts paid in earlier texts;
- a *look*: a draft's probabilities are read, so that the target reads no more of it than is worth the time;
- the *beginning* of a call: what our loop takes before the first draft, which short calls can't make up for;
- the *spread*: how unevenly drafts serve the items of a batch: of each item an *exponent*, to whose power it accepts tokens.
"""
