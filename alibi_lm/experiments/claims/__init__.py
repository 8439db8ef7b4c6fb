"""The claims about linear biases, each put to models trained under equal budgets."""
