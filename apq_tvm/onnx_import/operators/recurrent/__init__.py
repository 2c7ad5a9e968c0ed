"""LSTM, GRU and RNN: a linear layer for the inputs of all steps, and a loop over the steps."""
