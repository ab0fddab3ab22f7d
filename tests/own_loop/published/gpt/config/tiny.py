batch_size = 4
block_size = 32
n_layer, n_head, n_embd = 3, 2, 32
dropout = 0.1
