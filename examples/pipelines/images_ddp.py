"""Train on a folder of images with PyTorch DDP; stop in the middle of an epoch, and resume there.

Each rank reads its share of the images. The augmentation of an image depends on the seed, the epoch
and the image alone, so the resumed run sees what the first run would have seen.
"""

import numpy as np
import torch
import torch.distributed as dist
from sample_data import image_folder
from torch.nn.parallel import DistributedDataParallel

import headrace as hr


def augment(row, rng):
    image = row["image"][:, ::-1] if rng.random() < 0.5 else row["image"]
    return {"image": image.transpose(2, 0, 1) / np.float32(255), "label": row["label"]}


def train(rank, folder, run):
    dist.init_process_group("gloo", f"file://{folder}/run{run}", rank=rank, world_size=2)
    images = hr.Dataset.from_image_folder(folder, size=(32, 32)).shuffle(1000, seed=0)
    loader = hr.torch.loader(images.random_map(augment, seed=1).batch(8))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 2))
    if run == 2:
        saved = torch.load(folder / "checkpoint")
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["input"])
    model, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(loader, start=1):
        loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if run == 1 and step == 4:
            break
    if rank == 0:
        saved = {"model": model.module.state_dict(), "input": loader.state_dict()}
        torch.save(saved, folder / "checkpoint")
        print(f"run {run}: {step} steps, loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = image_folder()
    for run in (1, 2):
        torch.multiprocessing.spawn(train, (folder, run), nprocs=2)
