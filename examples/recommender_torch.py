"""A recommender in PyTorch, whose embedding tables are on parameter servers.

The model predicts whether a user likes a film. Tables have a row for each id that occurs, so ids
can be any 64-bit numbers, such as hashes of names. `hr.torch.loader` yields tensors, PyTorch trains
the dense layers, and `hr.torch.TableOptimizer` sends gradients of rows to the servers.

    pip install 'headrace[torch]'
    python examples/recommender_torch.py
"""

from __future__ import annotations

import numpy as np
import torch

import headrace as hr

USERS, FILMS, RATINGS, EPOCHS = 300, 100, 12_000, 4


def make_ratings() -> dict[str, np.ndarray]:
    """Return ratings of users and films of two genres; 95 % follow the taste of the user."""
    rng = np.random.default_rng(0)
    user, film = rng.integers(0, USERS, RATINGS), rng.integers(0, FILMS, RATINGS)
    liked = (user % 2 == film % 2) ^ (rng.random(RATINGS) < 0.05)
    hashes = rng.integers(1 << 40, 1 << 62, USERS + FILMS)
    return {
        "user": hashes[user],
        "film": hashes[USERS + film],
        "liked": liked.astype(np.float32),
    }


class Recommender(torch.nn.Module):
    """Scores pairs of users and films."""

    def __init__(self, users: hr.EmbeddingTable, films: hr.EmbeddingTable) -> None:
        super().__init__()
        self.user = hr.torch.Embedding(users)
        self.film = hr.torch.Embedding(films)
        self.top = torch.nn.Linear(users.dim, 1)

    def forward(self, user: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        """Return the logit of "likes it" for each pair."""
        return self.top(self.user(user) * self.film(film)).squeeze(-1)


def evaluate(model: Recommender, batches: hr.Dataset) -> float:
    """Return the accuracy; creates no rows."""
    model.eval()
    with torch.no_grad():
        hits = [
            (model(batch["user"], batch["film"]) > 0) == (batch["liked"] > 0.5)
            for batch in hr.torch.loader(batches)
        ]
    model.train()
    return torch.cat(hits).float().mean().item()


def main() -> None:
    """Train on most ratings; evaluate on the others."""
    torch.manual_seed(0)
    ratings = hr.Dataset.from_tensor_slices(make_ratings())
    train = ratings.take(10_000).shuffle(10_000, seed=0).batch(200)
    held_out = ratings.skip(10_000).batch(500)
    # The worker is for scheduled functions; this program trains in its own process.
    with hr.distribute.LocalCluster(num_workers=1, num_ps=2) as cluster:
        strategy = hr.distribute.ParameterServerStrategy(cluster.cluster_resolver)
        with strategy.scope():
            users, films = (
                hr.EmbeddingTable(8, name=name, initializer=hr.initializers.Uniform(-0.5, 0.5))
                for name in ("users", "films")
            )
        model = Recommender(users, films)
        dense = torch.optim.Adam(model.parameters(), 0.01)
        rows = hr.torch.TableOptimizer(hr.optimizers.Adam(0.05), model)
        for epoch in range(EPOCHS):
            losses = []
            for batch in hr.torch.loader(train):
                dense.zero_grad()
                scores = model(batch["user"], batch["film"])
                loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, batch["liked"])
                loss.backward()
                dense.step()
                rows.step()
                losses.append(loss.item())
            rows.flush()
            accuracy = evaluate(model, held_out)
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}, held-out {accuracy:.3f}")
        assert rows.iterations == EPOCHS * 50
        counts = [sum(len(ids) for ids, _ in table.export()) for table in (users, films)]
        strategy.close()
    print(f"accuracy {accuracy:.3f}; {counts[0]} rows of users and {counts[1]} of films")
    assert accuracy > 0.9


if __name__ == "__main__":
    main()
