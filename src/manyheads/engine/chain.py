"""The fast kernel for chains of layers with backward rules written by hand: stacked workers, one product a layer.

Per step and layer there is one batched product forward, one for the input gradient, and one that adds the weight
gradient straight into the momentum buffer (or the weight): no gradient of the size of the weights is ever stored.
The clip needs that gradient's norm nevertheless: with inputs x [B, in] and output gradients d [B, out] of a layer,
|d^T x|^2 = <d d^T, x x^T>, two B x B products. The gradient is made only for batches so large that it is smaller than
these products.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import ClassVar

import torch
from torch import Tensor, nn

from manyheads.engine.kernel import Batch, dropout_keys, summed_losses
from manyheads.engine.phase import Phase
from manyheads.engine.rules import Contribution, Keys, PoolingRule, Rule, Saved, TurnRule, add_products_, rule_for
from manyheads.engine.sgd import Descent, clip_factors, one_by_one
from manyheads.models.dropout import dropouts
from manyheads.models.layers import children, has_hooks
from manyheads.models.split import Split
from manyheads.tree import Buffers, Params, leading, select

Tape = list[Saved]


def is_chain(model: Split, *, images: bool = False) -> bool:
    """Whether there is a rule for every layer of the net, and no two layers share weights.

    ``images``: allow layers on images too, which is faster on GPUs only.
    """
    parts = [_rules(model.get_submodule(name), name, {}) for name in _parts(model)]
    rules = [rule for part in parts if part for rule in part]
    weights = [id(w) for rule in rules if rule.weights is not None for w in rule.weights.layer.parameters()]
    allowed = images or not any(rule.channels == "last" for rule in rules)
    # If no head sends a gradient into the features, these rules give them none: not even zeros, to decay by.
    reached = not model.detached.issuperset(model.head_names)
    return allowed and reached and None not in parts and len(set(weights)) == len(weights)


def _parts(model: Split) -> tuple[str, ...]:
    return ("representation", *model.head_names)


def _rules(module: nn.Module, name: str, params: Params) -> list[Rule] | None:
    """The layers' rules in order, with rules between them that move the channels to where a layer takes them.

    None: there is no rule for some layer.
    """
    rules = _layers(module, name, params)
    if rules is None or isinstance(next((r for r in rules if r.channels == "last"), None), PoolingRule):
        # If a pooling comes first, its images may have no channels.
        return None
    turned: list[Rule] = []
    last = False
    for rule in rules:
        wanted = rule.channels == "last" or (last and rule.channels == "any")
        if wanted != last:
            turned.append(TurnRule(-3, -1) if wanted else TurnRule(-1, -3))
        turned.append(rule)
        last = wanted
    return [*turned, TurnRule(-1, -3)] if last else turned


def _layers(module: nn.Module, name: str, params: Params) -> list[Rule] | None:
    if has_hooks(module):
        return None
    if type(module) is nn.Sequential:
        parts = [_layers(child, f"{name}.{child_name}", params) for child_name, child in children(module).items()]
        return None if None in parts else [rule for part in parts if part is not None for rule in part]
    if type(module) is nn.Identity:
        return []
    rule = rule_for(name, module, params)
    return None if rule is None else [rule]


class Chain:
    """A net of such layers in one kind of phase: outputs of A workers, and gradients back to their weights."""

    def __init__(self, model: Split, phase: Phase, params: Params) -> None:
        """``params``: the workers' rows, of which the first A are taken."""
        self.phase, self.detached = phase, model.detached
        self.body = _rules(model.representation, "representation", params) or []
        self.heads = {name: _rules(model.get_submodule(name), name, params) or [] for name in model.head_names}
        self.body_moves = "representation" in phase.update
        self.dropouts = {name: layer for name, layer in dropouts(model).items() if layer.p > 0}

    def forward(self, x: Tensor, dropout_base: Tensor, step: int | Tensor) -> tuple[Params, dict[str, Tape]]:
        """The heads' outputs, and the tapes for ``backward``."""
        keys = dropout_keys(self.dropouts, dropout_base, step)
        training = self.body_moves or self.phase.frozen == "train"
        features, tape = _forward(self.body, x, keys if training else {})
        outputs, tapes = {}, {"representation": tape}
        for name, rules in self.heads.items():
            outputs[name], tapes[name] = _forward(rules, features, keys)
        return outputs, tapes

    def backward(self, tapes: dict[str, Tape], gradients: Mapping[str, Tensor]) -> list[Contribution]:
        """The weight gradient of each layer that moves, from the outputs' gradients."""
        contributions: list[Contribution] = []
        into_features: Tensor | None = None
        for name, rules in self.heads.items():
            deeper = self.body_moves and name not in self.detached
            back = _backward(rules, tapes[name], gradients[name], name in self.phase.update, deeper, contributions)
            if back is not None:
                into_features = back if into_features is None else into_features + back
        if into_features is not None:
            _backward(self.body, tapes["representation"], into_features, True, False, contributions)
        return contributions


def _forward(rules: Sequence[Rule], x: Tensor, keys: Keys) -> tuple[Tensor, Tape]:
    tape: Tape = []
    for rule in rules:
        x, saved = rule.forward(x, keys)
        tape.append(saved)
    return x, tape


def _backward(
    rules: Sequence[Rule], tape: Tape, d: Tensor, moves: bool, deeper: bool, contributions: list[Contribution]
) -> Tensor | None:
    """Collect the contributions of layers if they move; returns the first input's gradient if ``deeper``."""
    trained = [k for k, rule in enumerate(rules) if rule.weights is not None and rule.weights.trained]
    first = 0 if deeper else (trained[0] if moves and trained else len(rules))
    for k in range(len(rules) - 1, first - 1, -1):
        rule, saved = rules[k], tape[k]
        if moves and rule.weights is not None and rule.weights.trained:
            contributions.append(Contribution(rule.weights.name, rule.weights.layer, d.flatten(1, -2), saved[0]))
        if deeper or k > first:
            d = rule.backward(d, saved)
    return d if deeper else None


class ChainKernel:
    """A chunk of workers in stacked products [A, B, features]."""

    padded: ClassVar[bool] = True

    def __init__(self, model: Split, phase: Phase, params: Params, buffers: Buffers) -> None:
        self.phase = phase
        self.chain = Chain(model, phase, params)
        self.descent = Descent(phase, select(params, phase.update))

    def step(self, batch: Batch) -> Tensor:
        outputs, tapes = self.chain.forward(batch.x, batch.dropout_base, batch.step)
        outputs = {name: output.detach().requires_grad_() for name, output in outputs.items()}
        constants = leading(self.phase.constants, len(batch.x))
        sums = summed_losses(self.phase.objective, outputs, batch.y, constants, batch.weight)
        # The sum of the workers' mean losses: its gradient in a worker's outputs is that worker's alone.
        # Zeros for a head that the objective leaves out: it decays, is pulled and is masked nevertheless.
        mean, heads = (sums / batch.count).sum(), list(outputs.values())
        gradients = torch.autograd.grad(mean, heads, allow_unused=True, materialize_grads=True)
        self._descend(self.chain.backward(tapes, dict(zip(outputs, gradients, strict=True))))
        return sums.detach()

    @staticmethod
    def scoring(model: Split, params: Params, buffers: Buffers) -> Callable[[Tensor], Tensor]:
        body, *heads = (_rules(model.get_submodule(part), part, params) or [] for part in _parts(model))

        def outputs(x: Tensor) -> Tensor:
            features, _ = _forward(body, x, {})
            return reduce(add, (_forward(rules, features, {})[0] for rules in heads))

        return outputs

    def _descend(self, contributions: list[Contribution]) -> None:
        sgd = self.phase.optimizer
        if sgd.clip is not None and contributions:
            square = one_by_one([c.square_norm(c.d.dtype) for c in contributions])
            factors = clip_factors(square, sgd.clip).view(-1, 1, 1)
            contributions = [replace(c, d=c.d * factors) for c in contributions]
        plain = not sgd.momentum and self.phase.proximal is None and self.phase.mask is None
        for c in contributions:
            name = f"{c.name}.weight"
            active, weight = len(c.d), self.descent.params[name]
            if plain:
                decay = 1 - sgd.lr * sgd.weight_decay
                add_products_(weight[:active], c.d.mT, c.x, beta=decay, alpha=-sgd.lr)
            elif sgd.momentum:
                momentum = self.descent.momentum(name)[:active]
                direction = add_products_(momentum, c.d.mT, c.x, beta=sgd.momentum)
                if sgd.weight_decay:
                    direction.add_(weight[:active], alpha=sgd.weight_decay)
                self.descent.move(name, direction)
            else:
                self.descent.apply(name, c.product())
            if c.bias:
                self.descent.apply(f"{c.name}.bias", c.d.sum(1))
