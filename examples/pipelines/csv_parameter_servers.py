"""Train embeddings on parameter servers with PyTorch: CSV, vocabularies, two tables."""

import torch
from sample_data import ratings

import headrace as hr

rows = hr.CsvDataset(ratings())
users = hr.Lookup.from_dataset(rows.map(lambda row: row["user"]))
items = hr.Lookup.from_dataset(rows.map(lambda row: row["item"]))
batches = rows.shuffle(3000, seed=1).repeat(10).batch(64)
examples = batches.map(lambda b: (users(b["user"]), items(b["item"]), b["liked"].astype("f4")))
with hr.distribute.LocalCluster(num_workers=1, num_ps=2) as cluster:
    with hr.distribute.ParameterServerStrategy(cluster.cluster_resolver).scope():
        tables = [hr.EmbeddingTable(8, name=name, initializer="normal") for name in ("u", "i")]
    layers = torch.nn.ModuleList(map(hr.torch.Embedding, tables))
    optimizer = hr.torch.TableOptimizer(hr.optimizers.Adam(0.05), layers)
    for user, item, liked in hr.torch.loader(examples):
        scores = (layers[0](user) * layers[1](item)).sum(-1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, liked)
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.3f}")
