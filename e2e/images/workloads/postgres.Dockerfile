# A replacement for the published PostgreSQL image, with the same user, directory and variables. It
# lacks just-in-time compilation, which would make the image twice as large.
ARG ROOTFS
FROM ${ROOTFS} AS collect
COPY collect /usr/local/bin/
COPY postgres-entrypoint /out/usr/local/bin/docker-entrypoint.sh
RUN sh /usr/local/bin/collect /out sh bash awk cat chmod chown cp date dd df du env false grep \
	head id locale ls mkdir mktemp mv rm rmdir sed seq setpriv sha256sum sleep stat sync tail test \
	touch tr true wc \
	/usr/lib/postgresql/*/bin/* \
	$(find /usr/lib/postgresql/*/lib -name '*.so' ! -name 'llvmjit*') && \
	cp -r --parents /usr/share/postgresql /usr/share/zoneinfo /usr/lib/locale/C.utf8 /out && \
	for program in /out/usr/lib/postgresql/*/bin/*; do \
		ln -s "${program#/out}" /out/usr/bin/; \
	done
RUN mkdir -p /out/etc /out/tmp /out/run/postgresql /out/var/lib/postgresql/data && \
	ln -s /run /out/var/run && \
	chmod 0755 /out/usr/local/bin/docker-entrypoint.sh && chmod 1777 /out/tmp && \
	printf '%s\n' root:x:0:0:root:/root:/bin/sh \
		postgres:x:999:999:PostgreSQL:/var/lib/postgresql:/bin/bash >/out/etc/passwd && \
	printf '%s\n' root:x:0: postgres:x:999: >/out/etc/group && \
	chown -R 999:999 /out/var/lib/postgresql /out/run/postgresql && \
	chmod 3777 /out/run/postgresql

FROM scratch
COPY --from=collect /out/ /
ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
	PGDATA=/var/lib/postgresql/data
VOLUME /var/lib/postgresql/data
STOPSIGNAL SIGINT
EXPOSE 5432
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["postgres"]
