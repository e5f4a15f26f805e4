"""What is trained: text, network, optimizer, and the merged model that a run leaves behind.

Arrays in, arrays out. Must not know processes, the network or the clock.
"""
