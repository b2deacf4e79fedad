"""The user's job: layers, samples, loss, optimizer; language models of transformers as layers."""
