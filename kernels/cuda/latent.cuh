// DeepSeek's width of a latent, without its key.

#pragma once

constexpr int LATENT = 512;
