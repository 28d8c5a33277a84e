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

Words of this package:

    θ, θ̂           the free weights (P,); their mode, or the trained weights that stand for it
    ℓ_D, π          log p(data | θ), and the prior of θ
    S, T, H         the curvature Σ JᵀΛJ of the data, −∇² log π, and their sum
    J, Λ, g         of a row: the Jacobian ∂f/∂θ, the precision −∂² log p/∂f², the score ∂ log p/∂f
    pass            one reading of all data, chunk by chunk, which returns sums over the rows
    chunk           some rows (B of them) that are computed together
    sums            what a pass collects; `statistics` are the part that a posterior keeps
    structure       how S is stored (`ssla.structures`): dense, Kronecker factors, diagonal, …
    polish, tilt    Newton steps of θ̂ to the mode; θ̂ stays, and a linear term makes it the mode
    averages        E log p, E g and E Λ of rows over a Gaussian of θ, in place of values at θ̂
    dispersion      the noise, temperature or overdispersion of a likelihood; also its spread
    doubt           epistemic uncertainty
    head            a last layer
"""
