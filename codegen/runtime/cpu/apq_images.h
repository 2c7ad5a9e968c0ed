/* What runs of single batches (run.c) and of images apart (images.c) have of each other. */
#ifndef APQ_IMAGES_H_
#define APQ_IMAGES_H_

#include "apq_context.h"

/* Points the context's buffers to what is kept from stage to stage. */
void apq_place_kept(const apq_context *c);
void apq_images_close(apq_context *c);

#endif
