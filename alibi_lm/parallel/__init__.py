"""How a run is split over ranks."""
