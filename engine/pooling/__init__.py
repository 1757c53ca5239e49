"""Models that return vectors or scores: encoders, embedders, cross-encoders, classifiers, reward models."""
