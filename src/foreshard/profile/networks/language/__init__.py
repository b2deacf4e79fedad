"""Networks that read text: BERT, Transformer-XL, the translation Transformer and GNMT.

Each module takes what its training script feeds it, samples first, and returns the loss of the batch, so that
the head over the vocabulary is part of the trace. Shapes are those of NVIDIA's DeepLearningExamples. Read
`bert` first.
"""
