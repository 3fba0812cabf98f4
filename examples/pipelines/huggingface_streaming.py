"""Read a streamed Hugging Face dataset: one line makes it a Dataset with exact states."""

import datasets
from sample_data import text_files

import headrace as hr

names = [str(path) for path in text_files()]
streamed = datasets.load_dataset("json", data_files=names, split="train", streaming=True)
texts = hr.Dataset.from_pipeline(streamed)
for batch in texts.shuffle(100, seed=1).batch(200):
    print(len(batch["text"]), "documents, the first is", batch["id"][0])
