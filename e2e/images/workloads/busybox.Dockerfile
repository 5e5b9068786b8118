# The commands of BusyBox under their names, as in the published image.
ARG ROOTFS
FROM ${ROOTFS} AS collect
RUN mkdir -p /out/bin /out/etc /out/tmp /out/root /out/var && chmod 1777 /out/tmp && \
	cp /bin/busybox /out/bin/ && \
	for command in $(busybox --list); do \
		test "$command" = busybox || ln -s busybox "/out/bin/$command"; \
	done && \
	echo root:x:0:0:root:/root:/bin/sh >/out/etc/passwd && echo root:x:0: >/out/etc/group

FROM scratch
COPY --from=collect /out/ /
ENV PATH=/bin
CMD ["sh"]
