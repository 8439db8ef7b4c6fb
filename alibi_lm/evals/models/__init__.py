"""The models that evals score: runs, transformers models, models split over ranks."""
