"""From a trained network and its data to a Posterior.

Start with `fit`, which reads from top to bottom.

    fit, steps                                  the story of a fit, and its steps
    arguments, fit_plan                         what a fit was asked for, and has learned
    passes, ranks                               passes over the data, of one process or of several
    sums, noise, mode, trained, variational     the mathematics of the steps
    prior_choice, tuning, evidence, …           a prior by the evidence or by held-out scores
    validation, choice, score_table, …          a setting by rows that the network has not seen
    price, guard                                training rows that the network has memorised
    further_passes, more_data, prior_change     posteriors that change
"""
