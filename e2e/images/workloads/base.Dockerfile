# A shell, tools for a person who examines a container, and the programs that the simulator runs.
ARG ROOTFS
FROM ${ROOTFS} AS collect
COPY collect /usr/local/bin/
RUN sh /usr/local/bin/collect /out sh which mount umount fsfreeze findmnt losetup lsblk blkid dd \
	sync stat cat ls sleep mkdir rm id ps && \
	mkdir -p /out/tmp /out/etc && chmod 1777 /out/tmp && cp /etc/passwd /etc/group /out/etc/

FROM scratch
COPY --from=collect /out/ /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["sh"]
