"""Problems around a convolution or a product as one normal form, whatever language prints them."""
