"""The baseline of startup_time.py: a bare DeepSpeed script with a model, an engine and one step."""

import json
import sys

import deepspeed
import torch
from torch import nn

job = json.loads(sys.argv[-1])
torch.set_num_threads(job["threads"])
deepspeed.init_distributed()
vocab, width = job["vocab_size"], job["hidden_size"]
block = nn.TransformerEncoderLayer(width, job["num_heads"], 4 * width, batch_first=True)
layers = nn.TransformerEncoder(block, job["num_layers"], enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(vocab, width), layers, nn.Linear(width, vocab))
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=job["deepspeed"]
)
for _ in range(engine.gradient_accumulation_steps()):
    tokens = torch.randint(vocab, (engine.train_micro_batch_size_per_gpu(), job["length"] + 1))
    logits = engine(tokens[:, :-1].to(engine.device)).flatten(0, 1).float()
    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten().to(engine.device))
    engine.backward(loss)
    engine.step()
sys.stdout.write(f"first step done, loss {loss.item():.3f}\n")
sys.stdout.flush()
