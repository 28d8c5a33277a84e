"""Refits of the weights (SSLA), for every candidate y.

reference           one (x, y) as the paper writes it: read this first
weight_refit        what users pass, and which engine serves it
weight_log_density  log densities at fixed inputs: which tasks are solved, and what failures become
solved              the options and the results of a refit, and the `Engine` protocol
refit_rows          the training rows of a refit, and the change of the log prior
last_layer*         a last layer: all tasks as products with the features
all_weights*        any weights, through `torch.func`
linearised*         the network linearised at θ̂, in the space of the outputs of all rows
anderson            maximises thousands of objectives at once from gradients alone
determinants        of all weights at θ̃: exact, frozen at θ̂, or from the structure

Terms and symbols of all these modules. docs/mathematics.md derives the formulas.

candidate   a y whose density is asked for
new row     an observation (x, y) that is added to the training rows
task        one refit: the number of a row of the new inputs x, and the target y added there
ℓ_D, π      the log likelihood of the training rows, and the density of the prior
θ̂, θ̃        the trained weights (P,), and the mode of a task: the weights after its refit
g₀, tilt    g₀ = ∇(ℓ_D + log π)(θ̂), zero at an exact mode. The tilt −g₀ᵀ(θ − θ̂) is added to the
            objective, so that θ̂ is its mode before a row is added; mode="as_is" leaves it out
objective   ℓ_D(θ) + log p(y|x,θ) + log π(θ) − g₀ᵀ(θ − θ̂); a refit maximises it
f, J        the outputs of a row (C,), and their Jacobian ∂f/∂θ (C, P)
Λ           the curvature −∇²log p(y|f) of a row in its outputs (C, C), also called its precision.
            Its kind: "observed", or "fisher" for its mean over y (the Fisher information)
H, H̃        the curvature −∇² of the log posterior (P, P), and the same with the new row
ΔΛ, ΔH      the changes of Λ and of the training rows' part of H between θ̂ and θ̃
K, R        K = J H⁻¹ Jᵀ, the covariance of the outputs of a row (C, C), and a root of it, R Rᵀ = K
push, pull  a product with J (a step to a change of outputs), and one with Jᵀ. The pull of a refit
            is the vector u (C,) whose step is H⁻¹Jᵀu
point       where a task is: the step δ = θ − θ̂ (P,), or the same in an engine's own coordinates
increment   one of the three parts of log p(y|x,D): of the likelihood, the prior, the curvature.
            That of the curvature is −½[log|H̃(θ̃)| − log|H(θ̂)|]; it exists where H̃ is positive
            definite
frozen      determinants in which the training rows keep their curvature at θ̂: ΔH is left out
block       some training rows that are worked on together
n, N        the numbers of training rows and of new inputs
C, P, F     the numbers of outputs, of free weights, and of features of a last layer (P = C·F)
m, M, b     the numbers of tasks in a group, of all tasks, and of rows in a block

A tensor (m, b, C) is stored component-major where its memory has the order (C, m, b). Products with
the features are then made without a copy.
"""
